"""Names what is to blame for something that fails: a race, an option, a commit.

What decides is pure: objects that are asked for the next trial and told its result, the same for
the same answers. So a search that was interrupted goes on by telling it the trials that are stored.
"""
