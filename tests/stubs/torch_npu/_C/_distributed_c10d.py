"""A name that MindSpeed's and Megatron's process groups ask for."""


class ProcessGroupHCCL:
    class Options: ...
