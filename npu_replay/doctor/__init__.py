"""What is wrong with an installation: `npu-replay doctor` and `npu_replay.report`."""

from npu_replay import options

ABOUT = "Say whether replay works here, and what to do if it doesn't (then exits 1)."
OPTIONS = (
    options.Option("imports", False, "Also import transformers (some seconds)."),
    *options.report("JSON file for what was found."),
)
END = options.ending("docs/doctor.md", "npu-replay doctor", "npu-replay doctor --json > doctor.json")
