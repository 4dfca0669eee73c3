"""What exists only to repeat published numbers; each stands next to the published one, with why they differ.

`penstock paper` prints them. Nothing else imports this package.
"""
