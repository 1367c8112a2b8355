"""Looking at a program before it runs: its graph, what can be computed ahead, and running it from the graph."""
