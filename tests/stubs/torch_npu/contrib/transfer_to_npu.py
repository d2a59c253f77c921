"""The real one makes torch.cuda mean torch.npu; here npu_replay.compat.cpu.lend() makes it mean the CPU."""
