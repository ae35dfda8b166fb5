"""MIPROv2: instructions and demonstrations of all components, proposed in advance and chosen jointly."""
