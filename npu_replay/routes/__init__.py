"""Holds routes as data: the ids that a pass chose, their checks, bytes, files and figures."""
