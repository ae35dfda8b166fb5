"""Programs of other frameworks as systems and components."""
