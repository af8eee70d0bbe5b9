"""One question per script; `python -m bench list` prints the committed results."""
