"""The pages: each module turns results into what one template shows."""
