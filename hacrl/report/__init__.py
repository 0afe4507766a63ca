"""One HTML file that shows what runs did: `write_report` in `page.py`. Needs neither torch nor a network."""
