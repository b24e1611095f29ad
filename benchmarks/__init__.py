"""Figures, not tests: each module measures one thing and says how. Run them with `make bench`."""
