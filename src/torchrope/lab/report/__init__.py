"""Turn the `results.json` of a study into tables, figures and one HTML page; no model is imported."""
