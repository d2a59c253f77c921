"""A stub of acl, CANN's Python interface."""


def get_soc_name() -> str:
    return "Ascend910B"
