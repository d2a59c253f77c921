"""Answer the top-k of a router inside one of its calls: what is done to torch, and what torch tells."""
