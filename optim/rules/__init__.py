"""The rules: every optimizer as its tuple, relatives side by side."""
