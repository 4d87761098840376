"""Pictures that the server draws as SVG: build graphs and charts.

They carry no inline style (the page's content policy forbids it): sizes are attributes, colours are
classes of the stylesheet. Each has a sentence for those who do not see it.
"""
