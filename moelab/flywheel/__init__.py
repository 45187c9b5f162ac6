"""The flywheel, in loop order: observe, capture, replay, snapshot, controls, predictors, train, gates."""
