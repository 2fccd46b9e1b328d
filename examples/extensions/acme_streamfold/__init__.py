"""Extensions of Streamfold in a package of their own; docs/contributing/extending.md explains them."""
