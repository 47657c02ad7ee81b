"""The paper's experiments: data sets, recipes (model, preprocessing, data set) and the demo."""
