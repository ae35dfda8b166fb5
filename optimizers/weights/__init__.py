"""Train weights: recipes, credit, losses and the learner."""
