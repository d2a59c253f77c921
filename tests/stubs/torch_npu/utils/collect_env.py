"""What MindSpeed asks of the installation."""


def get_cann_version(*_: object) -> str:
    return ""
