"""The console entry point, which also has something to say where the command line's packages are missing."""

from __future__ import annotations

import sys

from npu_replay.cli.exits import FAULT, INTERRUPTED, exit_code, failed, leave_pipe
from npu_replay.errors import ReplayError
from npu_replay.lazy import lazy
from npu_replay.tables import show_error

ALONE = {
    "doctor": "npu_replay.doctor.diagnose:run_command_line",
    "smoke": "npu_replay.smoke.run:run_command_line",
}
"""The commands that work without, for containers that are left as they are, and read their own options."""
_MISSING = (
    "{command} needs the packages typer and rich ({error}): pip install 'npu-replay[cli]', or "
    "pip install typer rich. Without them there are npu-replay doctor and npu-replay smoke"
)


def main() -> None:
    """Run the command that sys.argv asks for."""
    try:
        try:
            _run()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:
        leave_pipe()


def _run() -> None:
    try:
        import rich  # noqa: F401 - typer has worked without it
        import typer  # noqa: F401
    except ImportError as error:
        command = next(iter(sys.argv[1:]), "")
        if command in ALONE:
            _alone(command)
        asked = f"npu-replay {command}".rstrip()
        said = _MISSING.format(command=asked, error=error)
        show_error(said, as_json="--json" in sys.argv)
        raise SystemExit(FAULT) from None
    from npu_replay.cli.commands import app

    app()


def _alone(command: str) -> None:
    try:
        lazy(ALONE[command])(sys.argv[2:])
    except ReplayError as error:
        failed(error, as_json="--json" in sys.argv)
        raise SystemExit(exit_code(error)) from None
