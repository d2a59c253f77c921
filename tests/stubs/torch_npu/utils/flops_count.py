"""A name that MindSpeed imports."""


class FlopsCounter: ...
