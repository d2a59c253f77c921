"""MindSpeed and MindSpeed-LLM."""
