"""The command line: `app` defines the commands, one module per command."""
