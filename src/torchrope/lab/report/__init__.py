"""Turn results, `<study>[-<data>].json`, into tables, figures and one HTML page; no model is imported."""
