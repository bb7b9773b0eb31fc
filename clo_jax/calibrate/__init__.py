"""What a model needs measured before CLO runs at its best: head importance, hash projections, similarity, costs."""
