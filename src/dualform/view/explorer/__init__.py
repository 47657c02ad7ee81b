"""The explorer: a local web page on a memory. A view is one module here and one on the page."""
