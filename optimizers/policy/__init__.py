"""Training the weights of components: samples from runs of the graph, credit, one trainer."""
