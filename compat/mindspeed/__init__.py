"""Connects npu_replay to MindSpeed and MindSpeed-LLM."""
