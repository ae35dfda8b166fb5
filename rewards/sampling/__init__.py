"""Choose settings to draw outputs with, and test which outputs differ in their mean reward."""
