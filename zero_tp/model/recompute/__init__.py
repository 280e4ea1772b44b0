"""Choose the activations that backward recomputes, and store the inputs that it needs."""
