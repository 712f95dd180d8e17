"""Documents that the examples ask about. A real application has its own, from a search index or from files."""

FERRY = (
    "The ferry Cormorant connects Port Almery with Sill Island. It leaves Port Almery every morning at ten past "
    "seven, and Sill Island every evening at six. From November to March, when the sea is rough, it runs on Tuesdays "
    "and Saturdays only. It carries forty cars and two hundred passengers. Tickets are sold on board, and children "
    "under twelve travel free. The crossing takes fifty minutes; dogs must stay on the upper deck."
)
BAKERY = (
    "The bakery on Mill Lane belongs to Ines Aldous, whose grandmother opened it in 1951. It bakes rye bread on "
    "weekdays and plum cake on Sundays. The oven is still fired with beech wood, which is delivered once a month. "
    "Four people work there, two of them at night. Bread that is left over in the evening goes to the school "
    "kitchen, and what the school does not need is fed to the goats of the neighbouring farm."
)
MUSEUM = (
    "The harbour museum shows the wreck of the schooner Amity, which sank in the storm of 1887 and was raised ninety "
    "years later. Its most visited room has the ship's clock, which stopped at twenty to four. The museum is open "
    "from Wednesday to Sunday. Admission costs six coins, or nothing on the first Sunday of a month. The director, "
    "Tomas Reyl, guides visitors himself on Fridays and answers letters from schools."
)
