"""The half of the back end that compiles: nothing, since kernels are interpreted."""

from typing import Any

from triton.backends.compiler import BaseBackend


class CPUBackend(BaseBackend):
    @staticmethod
    def supports_target(target: Any) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return "cpu, interpreted"

    def parse_options(self, options: dict[str, Any]) -> dict[str, Any]:
        return dict(options)

    def add_stages(self, stages: object, options: object, language: object) -> None:
        raise NotImplementedError("this back end compiles nothing: set TRITON_INTERPRET=1")

    def load_dialects(self, context: object) -> None:
        pass

    def get_module_map(self) -> dict[str, Any]:
        return {}
