"""Programs for those who develop Headwater; no part of the package."""
