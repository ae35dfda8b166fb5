"""Training recipes: how rollouts are made and credit is assigned."""
