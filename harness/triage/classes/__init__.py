"""Classes of crashes, a module each: NAME, ORDER (who is asked first), TITLE, recognise(case)."""
