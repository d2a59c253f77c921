"""Record and replay each call of a model by the tokens that it is called with."""
