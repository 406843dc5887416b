"""`clusterkit top`: runs and their ranks in a terminal, as they go on.

`paint` makes lines of what is known, `board` keeps what a person looks at and takes keys; both know
nothing of terminals. `app` shows a board in one, by Textual.
"""
