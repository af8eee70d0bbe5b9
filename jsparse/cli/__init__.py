"""The command line; `app` holds the commands."""
