"""The examples as recipes: one line each."""

import dtf

_HERE = "tests.support.lit"
EXAMPLES = {
    "lit_classifier": ("LitClassifier", "DigitsData"),
    "lit_autoencoder": ("LitAutoEncoder", "image_loaders"),
    "lit_resnet": ("LitResnet", "Photos"),
    "lit_glue": ("GLUETransformer", "TextData"),
    "lit_regression": ("Regression", "regression_loaders"),
    "lit_multilabel": ("MultiLabel", "label_set_loaders"),
    "lit_transfer": ("TransferLearning", "Photos"),
    "lit_tokens": ("LanguageModel", "TokenData"),
    "lit_padded": ("GLUETransformer", "PaddedTextData"),
    "lit_vae": ("VAE", "image_loaders"),
    "lit_augmented": ("LitClassifier", "AugmentedDigits"),
    "lit_gan": ("GAN", "image_loaders"),
}
for _name, (_module, _data) in EXAMPLES.items():
    dtf.lightning_recipe(_name, module=f"{_HERE}.modules:{_module}", data=f"{_HERE}.data:{_data}")
