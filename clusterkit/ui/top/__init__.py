"""`clusterkit top`: runs and their ranks, live in a terminal.

`paint` formats lines of the screen, `board` holds what is shown and handles keys; neither needs a
terminal. `app` shows a board in one with Textual.
"""
