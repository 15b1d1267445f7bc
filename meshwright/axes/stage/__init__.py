"""A stage of a model: the whole model's forward, in which only the stage's own layers compute."""
