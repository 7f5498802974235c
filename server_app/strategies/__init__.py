"""One file a method; ``base.py`` holds what all of them share."""
