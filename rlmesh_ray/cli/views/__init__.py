"""What commands show: tables, progress, reports."""
