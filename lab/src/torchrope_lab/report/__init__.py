"""Render results, `<study>[-<data>].json`, as tables, figures and one HTML page, without importing models."""
