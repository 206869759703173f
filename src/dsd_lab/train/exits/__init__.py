"""Early exits for a frozen model, trained on scenes or on conversations."""
