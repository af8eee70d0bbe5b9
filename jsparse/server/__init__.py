"""Serves an engine over HTTP, with the names of OpenAI's API; needs the extra `server`."""
