"""A local web page that shows runs: their results, candidates, examples, rewards and training."""
