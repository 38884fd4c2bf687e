"""The store's schema, revision by revision. They are run when a store is opened."""

HEAD = "0007"  # the newest file in versions/
