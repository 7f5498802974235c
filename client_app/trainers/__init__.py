"""One file a family of methods; ``base.py`` holds what all of them share."""
