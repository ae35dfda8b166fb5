"""Metrics: the quality of an output, from 0 to 1, with feedback text for optimizers that use it.

A metric names the system output it reads and the field of `Example.gold` it compares with. A gold
field may hold a list of acceptable answers; the best match counts. Text is compared after SQuAD's
normalisation (Rajpurkar et al. 2016); labels and list items are compared exactly.
"""
