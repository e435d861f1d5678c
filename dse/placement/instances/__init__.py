"""Cost instances, limits and shortages of tables with priced options."""
