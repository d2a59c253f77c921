"""Devices by their name, for the commands."""

from __future__ import annotations

import os

import pytest
import torch

from npu_replay import devices


def test_on_the_cpu_megatron_sees_no_gpu_and_no_accelerator_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(devices, "available", lambda: pytest.fail("an accelerator was asked for"))
    assert devices.pick("cpu") == torch.device("cpu")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda:1", "nccl")])
def test_collectives_are_those_of_the_device_that_was_asked_for(device: str, backend: str) -> None:
    assert devices.backend(torch.device(device)) == backend
