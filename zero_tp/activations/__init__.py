"""Choose the activations that backward recomputes, and store the others."""
